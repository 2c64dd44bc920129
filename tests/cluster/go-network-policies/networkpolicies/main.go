// Command networkpolicies decides, for each new connection that the packet filter of this network namespace diverts to a queue, whether the
// NetworkPolicies of the cluster allow it.
//
// kube-network-policies' own program diverts connections with nftables, for which not every kernel has the expression "queue". The cluster
// diverts them with iptables instead (network.py), and this program ignores that the rules of nftables cannot be written.
package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"
	"sigs.k8s.io/kube-network-policies/pkg/networkpolicy"
)

func main() {
	kubeconfig := flag.String("kubeconfig", "", "path of the kubeconfig")
	queue := flag.Int("queue", 100, "number of the queue")
	flag.Parse()
	if err := run(*kubeconfig, *queue); err != nil {
		fmt.Fprintln(os.Stderr, "networkpolicies:", err)
		os.Exit(1)
	}
}

func run(kubeconfig string, queue int) error {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	config, err := clientcmd.BuildConfigFromFlags("", kubeconfig)
	if err != nil {
		return err
	}
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return err
	}
	factory := informers.NewSharedInformerFactory(client, 0)
	controller, err := networkpolicy.NewController(
		client,
		factory.Networking().V1().NetworkPolicies(),
		factory.Core().V1().Namespaces(),
		factory.Core().V1().Pods(),
		nil,
		nil,
		nil,
		nil,
		// NB: with NRIdisabled, version 0.8.0 panics at each packet with an address of no pod. All nodes share a network namespace, which has no
		// socket of NRI, so the addresses of pods are those that the API server has.
		networkpolicy.Config{QueueID: queue, NodeName: "all"},
	)
	if err != nil {
		return err
	}
	factory.Start(ctx.Done())
	return controller.Run(ctx)
}
