"""Figures of schedules and of what ran; needs the extra `experiments` (matplotlib).

The figure in the README is made by:

    python -c "from jaxdp import algorithms, draw; \
        draw.draw_schedule(algorithms.ring(4), 'docs/ring.png', 'Ring on 4 devices')"
"""

from jaxdp.draw.chunks import draw_schedule as draw_schedule
