"""Two Ray nodes on this machine with a core each, until standard input closes; prints the cluster's address.

A line "remove" takes the second node away as if it had lost its power.
"""

import json
import sys

from ray.cluster_utils import Cluster

if __name__ == "__main__":
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    second = cluster.add_node(num_cpus=1)
    print(json.dumps({"address": cluster.address}), flush=True)
    for line in sys.stdin:
        if line.strip() == "remove":
            cluster.remove_node(second, allow_graceful=False)
    cluster.shutdown()
