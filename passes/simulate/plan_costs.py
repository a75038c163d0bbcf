"""The predicted times of a plan's virtual worker, as the simulator and the message placement read them."""

from __future__ import annotations

import numpy as np

from hetpipe_compiler.ir.cluster import Cluster
from hetpipe_compiler.ir.plan import VirtualWorker
from hetpipe_compiler.passes.simulate.pipeline import PipelineCosts


def plan_costs(worker: VirtualWorker, cluster: Cluster) -> PipelineCosts:
    """Milliseconds of every computation and of every real message between the stages of ``worker``.

    A message goes from stage i to a later stage j if i sends j anything; its gradients come back if any of it needs one.
    """
    stages = worker.stages
    activations = np.full((len(stages), len(stages)), np.nan)
    gradients = np.full((len(stages), len(stages)), np.nan)
    for stage in stages:
        ports = {port.name: port for port in stage.outputs}
        for peer, names in stage.sends.items():
            link = cluster.link_between(cluster.device(stage.device), cluster.device(stages[peer].device))
            activations[stage.index, peer] = link.ms(sum(ports[n].bytes for n in names))
            back = [ports[n].bytes for n in names if ports[n].requires_grad]
            if back:
                gradients[peer, stage.index] = link.ms(sum(back))
    return PipelineCosts(
        forward_ms=np.array([s.forward_ms for s in stages]),
        backward_ms=np.array([s.backward_ms for s in stages]),
        activation_ms=activations,
        gradient_ms=gradients,
    )
