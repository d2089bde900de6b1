// Package main is etcd's server as a program: its module holds the code, and its main package refuses to be built
// from outside its own tree.
package main

import (
	"os"

	"go.etcd.io/etcd/server/v3/etcdmain"
)

func main() { etcdmain.Main(os.Args) }
