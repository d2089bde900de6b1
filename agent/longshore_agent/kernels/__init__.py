"""Copies between an engine's pages and staging memory, or between the pages of two ranks, on a CPU or a GPU."""
