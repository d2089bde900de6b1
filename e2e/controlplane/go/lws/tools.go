//go:build tools

// Package tools names the program that controlplane builds, so that go.mod holds what it needs.
package tools

import _ "sigs.k8s.io/lws/cmd"
