"""`demopt plan`: bytes, seconds and memory per step, and which method pays on a link, before anything runs."""
