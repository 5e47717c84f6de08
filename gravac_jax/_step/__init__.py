"""One step of the transform.

`update.py` checks what came and begins a step, of the `components.py` of a transform;
`phases.py` takes its six phases in their order: prepare, feed, own figures, exchange,
evidence, info. `states.py` and `step_info.py` are what is carried from step to step.

With a delay of one step, the memory is fed last: the exchange sends what the last step
left in the memory, so that it depends on nothing that this step computes, and the
network works while the devices do. What is on its way lies in the memory, as does
everything else that a replica holds back. Nothing else in a step differs. Where an
optimizer makes the steps that are fed, `norms.py` keeps their mean as long as they are.

With rounds (`every=`), each step feeds the memory, and only the last step of a round
exchanges what has gathered there. The others are *local*: they have no collective, and
change nothing but the memory and what is counted. Replicas know which step is which
because all count alike.

Two more things may happen to a step, and they are separate. A *bad* gradient is not
finite: its replica leaves it out, sends from what it holds back, and tells the others,
who go on. So no exchange waits to hear whether all gradients are good. A *delivery* is
no step at all: it asks for what is held back (`_loop/delivery.py`).

GraVAC's Algorithm 1 decides before it exchanges. Here a step decides a rung, the next
one agrees on it, and the second one after that takes it. So a decision costs no
collective, no branch waits for a message, and a host has time to read which program it
starts.
"""

from gravac_jax._step.components import Components as Components
from gravac_jax._step.update import update as update
