"""The data path, a stage a file: admit, gather, deliver, scatter, finish."""
