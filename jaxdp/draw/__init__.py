"""Figures of schedules, traces, timelines and asynchronous runs, and a page to step.

The figure in the README is made by:

    from jaxdp import algorithms, draw
    schedule = algorithms.ring(4)
    draw.draw_schedule(schedule, "docs/ring.png", title="Ring all-reduce on 4 devices")
"""

from jaxdp.draw.catalogue import names as names
from jaxdp.draw.chunks import draw_schedule as draw_schedule
from jaxdp.draw.gantt import draw_gantt as draw_gantt
from jaxdp.draw.lanes import draw_lanes as draw_lanes
from jaxdp.draw.stepping import write_page as write_page
from jaxdp.draw.timeline import draw_timeline as draw_timeline
from jaxdp.draw.timeline import draw_timelines as draw_timelines
