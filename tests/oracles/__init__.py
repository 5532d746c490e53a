"""The step, the update rules, the round and the wire, slow and literal: what tests compare every faster path with."""
