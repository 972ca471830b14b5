"""All claims, in the order of the articles, with the experiments that test them.

Where an article contradicts itself, the claim has both passages. Φ is the bytes of the
gradient, N the number of devices.
"""

import dataclasses
import difflib
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entry:
    """One claim.

    Attributes:
        id: CA1 to CA16 are of document A, on nn.DataParallel; CB1 to CB9 of document B,
            on parameter servers and ring all-reduce.
        title: The same in a few words, for figures.
        text: What is claimed.
        evidence: Experiments that test it; the first one that has a result counts.
        weighs: Why they count in this order; empty if there is one.
    """

    id: str
    title: str
    text: str
    evidence: tuple[str, ...]
    weighs: str = ""


DOCUMENT_A = (
    Entry(
        id="CA1",
        title="Gradients: weighted average, or sum",
        text="Gradients are averaged with weights on the main device, says one "
        "passage; they are summed and not averaged, says another.",
        evidence=("dp",),
    ),
    Entry(
        id="CA2",
        title="66 rows on 4 devices fail",
        text="The batch must be divisible by the number of devices, or scatter raises "
        "an error: 66 rows on 4 devices fail.",
        evidence=("errors",),
    ),
    Entry(
        id="CA3",
        title="The main device needs 20-40 % more memory",
        text="The main device uses 20-30 % more memory than the others; 25-40 %, and "
        "30 %, say other passages. For ResNet-50 with a batch of 64 on 4 devices it is "
        "806 MB against 452 MB, and the extra 354 MB are 3 x 98 MB of gradients, the "
        "optimizer state and the gather buffer.",
        evidence=("memory",),
    ),
    Entry(
        id="CA4",
        title="Gathered logits take 256 KB, there alone",
        text="Gathered logits of shape (64, 1000) take 256 KB, on the main device "
        "only.",
        evidence=("memory",),
    ),
    Entry(
        id="CA5",
        title="DDP is 15-30 % faster",
        text="DistributedDataParallel is 15-30 % faster than DataParallel.",
        evidence=("scaling", "gpu", "ddp"),
        weighs="scaling covers two models on two kinds of hosts, 2 to 8 devices; gpu "
        "one kind of host with 8. ddp times forced host devices, which have no links.",
    ),
    Entry(
        id="CA6",
        title="Throughput falls above 4 devices or 100 M",
        text="Above 4 devices or 100 M parameters the main device's link saturates, "
        "and throughput falls.",
        evidence=("scaling",),
    ),
    Entry(
        id="CA7",
        title="no_grad saves 40 % of memory",
        text="torch.no_grad saves about 40 % of memory.",
        evidence=("memory",),
    ),
    Entry(
        id="CA8",
        title="16 bits save 50 % memory and 20 % time",
        text="Mixed precision saves about 50 % of memory and 20 % of time.",
        evidence=("amp",),
    ),
    Entry(
        id="CA9",
        title="output_device outside, and inside device_ids",
        text="output_device must lie outside device_ids and, by the same sentence, "
        "inside.",
        evidence=("errors",),
    ),
    Entry(
        id="CA10",
        title="device_ids=[3,1,0,2]: first quarter to 3",
        text="device_ids=[3, 1, 0, 2] sends the first quarter of the batch to device "
        "3.",
        evidence=("dp",),
    ),
    Entry(
        id="CA11",
        title="Gradient norms are equal on all devices",
        text="After backward the gradient norm is the same on all four devices, as a "
        "script prints it.",
        evidence=("dp",),
    ),
    Entry(
        id="CA12",
        title="replicate() alone loses gradients",
        text="With replicate() alone the .grad of replicas is None, gradients are "
        "lost, and the optimizer sees only device 0.",
        evidence=("errors",),
    ),
    Entry(
        id="CA13",
        title="Plain attributes are not copied",
        text="Plain tensor attributes are not copied to the replicas, where reading "
        "them raises an AttributeError; parameters and buffers are copied.",
        evidence=("errors",),
    ),
    Entry(
        id="CA14",
        title="Carried hidden state cannot be used",
        text="Recurrent networks that carry their hidden state cannot be used, since "
        "scatter cuts the gradient of the first state.",
        evidence=("errors",),
    ),
    Entry(
        id="CA15",
        title="ResNet-50's parameters are 98 MB",
        text="The parameters of ResNet-50 take 98 MB.",
        evidence=("memory",),
    ),
    Entry(
        id="CA16",
        title="Parameters go out after the update",
        text="_sync_params_and_buffers and _broadcast_coalesced broadcast parameters "
        "after the update, says one passage; they are replicated at the next forward, "
        "says another.",
        evidence=("dp",),
    ),
)

DOCUMENT_B = (
    Entry(
        id="CB1",
        title="A ring sends 2(N-1)Φ/N per device",
        text="In a ring every device moves (N-1)Φ/N in reduce-scatter and as much in "
        "all-gather: 2(N-1)Φ/N in all, towards 2Φ, independent of N.",
        evidence=("ring", "traffic", "algorithms", "gpu"),
        weighs="ring counts the bare collective, phase by phase; the others count it "
        "inside training steps, where a loss and padding ride along, or in schedules.",
    ),
    Entry(
        id="CB2",
        title="A server takes N times longer than a ring",
        text="Over all links a parameter server moves as much as a ring, 2NΦ, but one "
        "server carries it all, so that it takes about N times longer.",
        evidence=("bandwidth", "ps", "traffic", "algorithms"),
        weighs="bandwidth measures times, on links of limited rate; the others count "
        "the same bytes and predict times from them.",
    ),
    Entry(
        id="CB3",
        title="Reduce-scatter leaves one chunk each",
        text="After reduce-scatter each device owns exactly one complete chunk.",
        evidence=("ring",),
    ),
    Entry(
        id="CB4",
        title="Asynchrony: workers never wait",
        text="Asynchrony raises the ratio of computation to communication, since "
        "workers never wait.",
        evidence=("staleness", "bandwidth", "overlap_delay"),
        weighs="staleness has the asynchrony that the article describes, without a "
        "bound and with one; the others have a delay of exactly one step: bandwidth "
        "measures it between processes, overlap_delay predicts it.",
    ),
    Entry(
        id="CB5",
        title="Asynchrony slows convergence",
        text="Asynchrony slows the convergence of SGD, as if the batch grew at fixed "
        "parameters W; a longer delay slows it more.",
        evidence=("staleness",),
    ),
    Entry(
        id="CB6",
        title="Each of S servers carries 1/S",
        text="Several servers spread the load: each of S servers carries 1/S of it.",
        evidence=("ps", "traffic"),
        weighs="ps counts all arrangements of servers on 2 to 8 devices; traffic some "
        "of them, on up to 64.",
    ),
    Entry(
        id="CB7",
        title="Replicas stay identical",
        text="After an all-reduce and the same update all replicas are identical.",
        evidence=("compare",),
    ),
    Entry(
        id="CB8",
        title="ZeRO removes full copies",
        text="Plain data parallelism stores a full copy of everything on every device; "
        "ZeRO removes that redundancy.",
        evidence=("zero",),
    ),
    Entry(
        id="CB9",
        title="GPipe: better use, less memory",
        text="GPipe: micro-batches raise utilisation, and re-materialization lowers "
        "memory.",
        evidence=("pipeline",),
    ),
)

CLAIMS = {entry.id: entry for entry in (*DOCUMENT_A, *DOCUMENT_B)}


def text(claim_id: str) -> str:
    """What is claimed, as experiments write it into their results."""
    return CLAIMS[claim_id].text


def chosen(ids: Sequence[str]) -> list[Entry]:
    """Claims by id, in the order of the articles; all if none is named.

    Raises:
        ValueError: There is no such claim.
    """
    unknown = [given for given in ids if given not in CLAIMS]
    if unknown:
        close = difflib.get_close_matches(unknown[0].upper(), CLAIMS, n=1, cutoff=0.5)
        nearest = close[0] if close else "CB1"
        raise ValueError(
            f"--only got {' '.join(unknown)}. A claim must be one of the "
            f"{len(CLAIMS)} that there are: {', '.join(CLAIMS)}. "
            + (f"Did you mean {nearest}?" if close else f"Use --only {nearest}.")
        )
    return [entry for entry in CLAIMS.values() if not ids or entry.id in ids]
