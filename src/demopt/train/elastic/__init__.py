"""Elastic training with torchft: workers that come and go. And the key of a run, see exchange/sealed.py."""
