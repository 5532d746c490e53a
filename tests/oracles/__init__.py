"""The step, the update rules, the round and the wire, slow and literal: tests compare every faster path with them."""
