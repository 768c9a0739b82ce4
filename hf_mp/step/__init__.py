"""One training step in mixed precision, in the order in which it runs (Micikevicius et al. 2017, arXiv 1710.03740).

Files of this folder first, then the others of ``hf_mp`` that do the stage's work.

1. Attach: :meth:`MixedPrecision.attach` gives the model FP32 masters and puts :class:`AttachedForward` in the place of
   ``model.forward`` (``mixed_precision.py``, ``forward.py``); :meth:`~MixedPrecision.attach_optimizer` puts a
   :class:`StepGuard` in front of ``optimizer.step`` (``update.py``).
   Masters: ``weights/layout.py``; of a lean layout ``weights/split_layout.py``.
2. Forward: ``AttachedForward`` enters a :class:`ForwardContext`. :meth:`StepRuntime.begin_forward` gets its weights
   from their owner, :class:`WeightSource` (``weights/source.py``): the working copies that products use, behind inward
   borders, of which small weights share one. The context puts them into their slots, and the model's own forward runs
   in it; so does what a backward recomputes.
   How the model is spread: ``ranks/parallelism.py``; which weights lower-precision ops read:
   ``weights/weight_uses.py``; copies: ``working_copies.py``; the slots and external tensors of one forward:
   ``slots.py``, ``external.py``; borders: ``borders.py``.
   Casts of each call: ``casting/handlers.py``, on a CPU ``cpu_handlers.py``, called by ``casting/dispatched.py`` or
   ``casting/mode.py``; what is put in the place of parts of the model: ``models/``; losses:
   ``loss_handlers.py``; caches of keys and values: ``kv_cache.py``.
3. Out: each output passes an output border, to FP32: ``borders.py``.
   Outputs in a structure: ``kernels/nested.py``; logits that perhaps nobody reads: ``deferred_output.py``.
4. Backward: the borders ask :class:`StepRuntime` (``runtime.py``). A gradient that enters through an output border is
   multiplied by the loss scale S (``loss_scale_on``), and ``GradientCheck.gradient_entered`` takes note; one that
   leaves through an inward border is multiplied by 1/S in FP32 (``inverse_scale_on``), unless a lean layout keeps it as
   it is (``keep_scaled``; ``weights/split_parameter.py``).
5. Check: when the backward has ended, ``GradientCheck`` measures what it left in ``.grad``, for the next loss scale
   (``gradients.py``). The update reads the gradients again, unless ``max_grad_norm`` is set: a loop may have clipped.
   What it left: ``weights/layout.py``; the pass over it: ``kernels/gradient_scan.py``; one verdict for all ranks:
   ``ranks/agreement.py``.
6. Update: ``optimizer.step()`` asks :meth:`StepRuntime.verdict`, and with it the check; the guard acts on it.
   ``StepGuard._finish`` reads the verdict and skips the update on an overflow, or lets the optimizer write the masters
   and their owner refresh the working copies. With torch's fused Adam on a GPU the host does not wait:
   ``StepGuard._update_unless`` queues an update that the device skips, and ``_finish`` runs when the next backward asks
   for S.
   With ``offload``, in chunks from host memory and back: ``weights/offload/``.
   One kernel for both: ``weights/fused_adamw.py``, ``kernels/adamw.py`` (which of the two runs: ``registry.py``). Lean:
   ``weights/master_weight_optimizer.py``; halves of a master: ``kernels/split.py``; reads of them:
   ``outside_reads.py``. Steps of optimizers that are not attached: ``unattached.py``.
7. Next scale: ``StepRuntime.finish_step`` tells the observers (``step/observers.py``), and the loss scaler, which
   sets the next S: ``scaling/loss_scaler.py``, ``scaling/rules.py``. Steps of several optimizers between two backwards
   set it once.

``profiling.py`` names these parts for a profiler.
"""
