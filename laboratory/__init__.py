"""Research and measurement around demopt: simulated workers, comparisons, networks, benchmarks. See README.md."""
