"""When a compiled program computes and communicates, predicted for some hardware."""

from jaxdp.program.timeline.replay import Bar, Timeline, play, replay

__all__ = ("Bar", "Timeline", "play", "replay")
