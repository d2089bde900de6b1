//go:build tools

// Package tools names the programs that controlplane builds, so that go.mod holds what they need.
package tools

import (
	_ "github.com/prometheus/prometheus/cmd/prometheus"
	_ "github.com/prometheus/prometheus/cmd/promtool"
)
