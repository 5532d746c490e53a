"""The step, relay and the update rules, slow and literal: what tests compare every faster path with."""
