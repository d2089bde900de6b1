// Command dashboard reads a Grafana dashboard from its standard input and checks it with the types of Grafana's own SDK: unknown
// or missing fields and values of a wrong type fail, also in the options of panels and in queries.
package main

import (
	"fmt"
	"io"
	"os"

	"github.com/grafana/grafana-foundation-sdk/go/cog/plugins"
	"github.com/grafana/grafana-foundation-sdk/go/dashboard"
)

func main() {
	plugins.RegisterDefaultPlugins()
	text, err := io.ReadAll(os.Stdin)
	found := dashboard.Dashboard{}
	for _, err := range []error{err, found.UnmarshalJSONStrict(text), found.Validate()} {
		// The SDK also returns its list of errors if that is empty.
		if err != nil && err.Error() != "" {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
	}
}
