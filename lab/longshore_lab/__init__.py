"""The laboratory: the demo, the benchmarks, the test engine and the reference engine. All but the test engine need the extra `lab`."""
