// Command versitygw serves a folder over the API of S3: of the gateway's backends it has the one for a file system.
package main

import (
	"context"
	"flag"
	"log"
	"os"
	"os/signal"
	"syscall"

	"github.com/versity/versitygw/backend/meta"
	"github.com/versity/versitygw/backend/posix"
	"github.com/versity/versitygw/embedgw"
)

func main() {
	port := flag.String("port", ":7070", "address to listen at")
	flag.Parse()
	if flag.NArg() != 1 {
		log.Fatal("usage: versitygw [--port ADDRESS] FOLDER")
	}
	ctx, cancel := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer cancel()
	if err := serve(ctx, *port, flag.Arg(0)); err != nil {
		log.Fatal(err)
	}
}

// serve answers requests until the context ends. Metadata of objects is kept in extended attributes.
func serve(ctx context.Context, port, folder string) error {
	if err := (meta.XattrMeta{}).Test(folder); err != nil {
		return err
	}
	// NB: the threshold has no default: without it no object can be copied, and the files of a checkpoint get their names by copies.
	store, err := posix.New(folder, meta.XattrMeta{}, posix.PosixOpts{
		Concurrency:         5000,
		CopyObjectThreshold: 5 << 30,
	})
	if err != nil {
		return err
	}
	return embedgw.RunVersityGW(ctx, store, &embedgw.Config{
		RootUserAccess:    os.Getenv("ROOT_ACCESS_KEY"),
		RootUserSecret:    os.Getenv("ROOT_SECRET_KEY"),
		Ports:             []string{port},
		MaxConnections:    250000,
		MaxRequests:       100000,
		MultipartMaxParts: 10000,
		Quiet:             true,
	})
}
