// Command argocd is the two programs of Argo CD that compare and apply, in one: it runs as whatever it is called by,
// or as its first argument says ("argocd argocd-repo-server --port ...").
package main

import (
	"fmt"
	"os"
	"path/filepath"

	controller "github.com/argoproj/argo-cd/v3/cmd/argocd-application-controller/commands"
	reposerver "github.com/argoproj/argo-cd/v3/cmd/argocd-repo-server/commands"
	"github.com/spf13/cobra"
)

// commands are the programs inside, by the name each is usually called by.
var commands = map[string]func() *cobra.Command{
	"argocd-application-controller": controller.NewCommand,
	"argocd-repo-server":            reposerver.NewCommand,
}

func main() {
	name := filepath.Base(os.Args[0])
	if name == "argocd" && len(os.Args) > 1 {
		name = os.Args[1]
		os.Args = os.Args[1:]
	}
	if commands[name] == nil {
		fmt.Fprintln(os.Stderr, "argocd: call me argocd-application-controller or argocd-repo-server")
		os.Exit(2)
	}
	if err := commands[name]().Execute(); err != nil {
		os.Exit(1)
	}
}
