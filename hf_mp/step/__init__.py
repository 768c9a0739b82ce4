"""One training step in mixed precision, in the order in which it runs (Micikevicius et al. 2017, arXiv 1710.03740).

1. Attach: :meth:`MixedPrecision.attach` gives the model FP32 masters and puts :class:`AttachedForward` in the place of
   ``model.forward`` (``mixed_precision.py``, ``forward.py``); :meth:`~MixedPrecision.attach_optimizer` puts a
   :class:`StepGuard` in front of ``optimizer.step`` (``update.py``).
2. Forward: ``AttachedForward.__call__`` makes a ``_Passage``. :meth:`MixedPrecision.begin_forward` puts the working
   copies of the weights that products use into their slots, behind inward borders, of which small weights share one
   (``Slots`` in ``hf_mp/weights/``; ``hf_mp/scaling/borders.py``), and the passage runs the model's own forward in
   autocast (``Region`` in ``hf_mp/weights/``).
3. Out: each output passes an output border, to FP32.
4. Backward: the borders ask :class:`MixedPrecision`. A gradient that enters through an output border is multiplied by
   the loss scale S (``scale``), and ``GradientCheck.backward_began`` takes note (``gradient_entered``); one that leaves
   through an inward border is multiplied by 1/S in FP32 (``inverse``), unless a lean layout keeps it (``take``).
5. Check: when the backward has ended, ``GradientCheck`` measures what it left in ``.grad`` (``gradients.py``).
6. Update: ``optimizer.step()`` asks :meth:`MixedPrecision.verdict`, and with it the check; the guard skips the update
   on an overflow, or lets the optimizer write the masters and the layout refresh the working copies.
7. Next scale: ``MixedPrecision.finish_step`` tells the observers, and the loss scaler, which sets the next S.
"""
