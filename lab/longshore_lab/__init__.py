"""The laboratory: the demo, the benchmarks and the reference engine that both run. Needs the extra `lab`."""
