"""The `longshore` command: the demo on one machine, benchmarks, and the reference engine that both drive."""
