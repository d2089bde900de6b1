"""The `longshore` command: agents of one machine (`up`), keys, and the way into the laboratory (`demo`, `bench`)."""
