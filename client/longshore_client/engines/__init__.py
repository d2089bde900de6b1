"""Connectors: what makes an inference engine a user of the client. One module an engine; only they import one."""
