"""Processes for tests that start in milliseconds, with everything imported: forked by a server that forks nothing else.

One server and one list of imports for all of them: a process can have no second server.
"""

import multiprocessing
import os

os.environ["RUST_LOG"] = "error"  # torchft reads it when it is imported
CONTEXT = multiprocessing.get_context("forkserver")
# What is not installed is left out.
CONTEXT.set_forkserver_preload(["torch", "demopt.exchange", "demopt.integrations.torchft", "torch._dynamo", "torchft"])
