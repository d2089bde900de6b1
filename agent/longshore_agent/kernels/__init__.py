"""Copies between an engine's pages and staging memory, or the pages of another rank: on a CPU, and on a GPU."""
