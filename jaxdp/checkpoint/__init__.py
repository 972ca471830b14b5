"""Checkpoints: everything a run needs, restored onto any design and device count.

What is on disk depends on neither: full parameters, the optimizer state as
`optimizer.init(params)` makes it, and what a design carries besides. Orbax writes and
reads the arrays; a manifest, written last, says what a complete checkpoint holds.

Its modules:

    manager, given             `Checkpoints`, and what it is given
    capture, content           a state as it is now, and what of it is kept
    folders, arrays, manifest  where it lies, complete or not at all
    restoring, comparing       the newest that is whole, and whether it fits
    names, exporting           leaves by name, also for other tools
"""

from jaxdp.checkpoint.exporting import export as export
from jaxdp.checkpoint.exporting import load as load
from jaxdp.checkpoint.folders import CheckpointWarning as CheckpointWarning
from jaxdp.checkpoint.manager import Checkpoints as Checkpoints
from jaxdp.checkpoint.manager import Restored as Restored
