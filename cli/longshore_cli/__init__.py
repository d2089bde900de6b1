"""The `longshore` command: runs agents on one machine (`up`), makes keys, and starts the laboratory (`demo`, `bench`)."""
