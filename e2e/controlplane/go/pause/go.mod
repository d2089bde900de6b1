module longshore.dev/e2e/controlplane/pause

go 1.24.0
