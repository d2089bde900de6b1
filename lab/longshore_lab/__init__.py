"""Shows and measures Longshore: the demo, the benchmarks, and the reference engine that both run. Installed by the extra `lab`."""
