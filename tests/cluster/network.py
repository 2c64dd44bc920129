"""The cluster's network: a cable to this machine, a bridge for nodes and pods, how pods are plugged in, and what they may connect to."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from cluster.plan import DOMAIN, HOST_NAME
from cluster.process import run

if TYPE_CHECKING:
    from cluster.plan import Plan

UPLINK = "uplink"
# The queue to which new connections go, for the program that knows the NetworkPolicies.
POLICIES_QUEUE = 100
_BRIDGE_FILTER = Path("/proc/sys/net/bridge/bridge-nf-call-iptables")
BRIDGE = "cni0"


def connect(plan: Plan, namespace: int) -> None:
    """On this machine: lay the cable into the network namespace of a process, and the routes through it."""
    link = plan.host_link
    run("ip", "link", "add", link, "type", "veth", "peer", "name", UPLINK, "netns", str(namespace))
    run("ip", "address", "add", f"{plan.host_address}/30", "dev", link)
    run("ip", "link", "set", link, "up")
    for network in (plan.pods, plan.services):
        run("ip", "route", "add", network, "via", plan.address, "dev", link)


def disconnect(plan: Plan) -> None:
    """On this machine: take the cable away, and with it its address and routes."""
    run("ip", "link", "delete", plan.host_link, check=False)


def connected() -> bool:
    """In the namespace: whether the cable has arrived."""
    return run("ip", "link", "show", UPLINK, check=False) != ""


def configure(plan: Plan) -> None:
    """In the namespace: addresses for the cluster and its nodes, and forwarding between cable and bridge."""
    run("ip", "link", "set", "lo", "up")
    run("ip", "address", "add", f"{plan.address}/30", "dev", UPLINK)
    run("ip", "link", "set", UPLINK, "up")
    run("ip", "link", "add", BRIDGE, "type", "bridge")
    for address in (plan.gateway, *(plan.node_address(1 + number) for number in range(plan.nodes))):
        run("ip", "address", "add", f"{address}/22", "dev", BRIDGE)
    run("ip", "link", "set", BRIDGE, "up")
    Path("/proc/sys/net/ipv4/ip_forward").write_text("1")
    if can_enforce_policies():
        _divert_connections()


def can_enforce_policies() -> bool:
    """Whether the kernel can show the packets on a bridge to the packet filter: br_netfilter, which may be a module that is not loaded."""
    return _BRIDGE_FILTER.exists()


def _divert_connections() -> None:
    """Ask the program that knows the NetworkPolicies about each new connection to a pod; without it, all are allowed.

    NB: pods of one bridge reach each other without routing, so the bridge has to show their packets to the packet filter.
    """
    _BRIDGE_FILTER.write_text("1")
    new_connections = ("--match", "conntrack", "--ctstate", "NEW")
    queue = ("--jump", "NFQUEUE", "--queue-num", str(POLICIES_QUEUE), "--queue-bypass")
    # NB: kube-proxy has no rules in this table.
    run("iptables", "--table", "mangle", "--append", "FORWARD", *new_connections, *queue)


def cni(plan: Plan, addresses: Path) -> dict[str, Any]:
    """The network that containerd plugs pods into; every node shares the record of addresses given out."""
    bridge = {
        "type": "bridge",
        "bridge": BRIDGE,
        "isGateway": True,
        "hairpinMode": True,
        "ipam": {
            "type": "host-local",
            "dataDir": str(addresses),
            "ranges": [[{"subnet": plan.pods, "rangeStart": plan.first_pod, "gateway": plan.gateway}]],
            "routes": [{"dst": "0.0.0.0/0"}],
        },
    }
    ports = {"type": "portmap", "capabilities": {"portMappings": True}}
    return {"cniVersion": "1.0.0", "name": "pods", "plugins": [bridge, ports]}


def corefile(plan: Plan, kubeconfig: Path) -> str:
    """CoreDNS's configuration.

    Nothing is cached and names live for a second, so that a pod that comes is found at once. Names that are not
    the cluster's do not exist: pods reach this machine as `host.cluster.internal`, and nothing beyond it.
    """
    return f"""\
{DOMAIN}:53 in-addr.arpa:53 {{
    bind {plan.gateway}
    errors
    ready 127.0.0.1:8181
    kubernetes {DOMAIN} in-addr.arpa {{
        kubeconfig {kubeconfig}
        pods insecure
        ttl 1
    }}
}}
{HOST_NAME}:53 {{
    bind {plan.gateway}
    hosts {{
        {plan.host_address} {HOST_NAME}
    }}
}}
.:53 {{
    bind {plan.gateway}
    errors
    template ANY ANY . {{
        rcode NXDOMAIN
    }}
}}
"""


def proxy_flags(plan: Plan, kubeconfig: Path) -> dict[str, str]:
    """kube-proxy's flags: one of it serves all nodes, since they share a network namespace."""
    return {
        "kubeconfig": str(kubeconfig),
        "hostname-override": plan.node_name(1),
        "proxy-mode": "iptables",
        "cluster-cidr": plan.pods,
        # NB: otherwise responses between pods on one bridge would bypass the address translation.
        "masquerade-all": "true",
        "iptables-min-sync-period": "200ms",
        # NB: the kernel's limits are this machine's, not the namespace's: leave them.
        "conntrack-max-per-core": "0",
        "conntrack-min": "0",
        "conntrack-tcp-timeout-established": "0",
        "conntrack-tcp-timeout-close-wait": "0",
        "metrics-bind-address": "127.0.0.1:10249",
        "healthz-bind-address": "127.0.0.1:10256",
    }
