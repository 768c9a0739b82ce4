"""One training step in mixed precision, in the order in which it runs (Micikevicius et al. 2017, arXiv 1710.03740).

Each stage names files of this folder first, then those of other folders.

1. Attach. :meth:`MixedPrecision.attach` gives the model FP32 masters and replaces ``model.forward`` by
   :class:`AttachedForward` (``mixed_precision.py``, ``forward.py``). :meth:`~MixedPrecision.attach_optimizer` replaces
   ``optimizer.step`` by the step of a :class:`StepGuard` (``update.py``).
   Masters: ``weights/layout.py``; lean: ``weights/split_layout.py``.
2. Forward. ``AttachedForward`` enters a :class:`ForwardContext`. :meth:`StepRuntime.begin_forward` gets its weights
   from :class:`WeightStore` (``weights/source.py``). The parameter slots keep the FP32 weights; if gradients are
   scaled, they hold aliases of them, outputs of unscale nodes. Autocast finds the working copy of a weight or alias by
   its identity. A recomputation in a backward enters the context again.
   Sharding: ``ranks/parallelism.py``; slots and the look-up of copies: ``weights/slots.py``; weights with a copy:
   ``weight_uses.py``; the copies: ``working_copies.py``; tensors from outside: ``external.py``; unscale nodes:
   ``borders.py``.
   Casts of each call: ``casting/handlers.py``, on a CPU ``cpu_handlers.py``, called by ``casting/dispatched.py`` or
   ``casting/mode.py``; replaced parts of the model: ``models/``; losses: ``loss_handlers.py``; caches of keys and
   values: ``kv_cache.py``.
3. Outputs. Each output is cast to FP32 by a node that will scale its gradient: ``borders.py``.
   Outputs in a structure: ``kernels/nested.py``; logits without a reader: ``deferred_output.py``.
4. Backward. The nodes read S and 1/S from :class:`LossScaleProvider` (``scale_provider.py``). A gradient that enters
   through an output is multiplied by the loss scale S, and ``GradientCheck.on_output_gradient`` records it. A gradient
   that leaves through an unscale node is multiplied by 1/S in FP32, unless a lean layout keeps it scaled
   (``weights/split_parameter.py``).
   Custom functions that recompute in their backward: ``custom_backward.py``.
5. Check. After the backward, ``GradientCheck`` measures the gradients, for the next loss scale (``gradients.py``). The
   update reads them again, because a loop may have clipped them, unless ``max_grad_norm`` is set.
   Gradients of a layout: ``weights/layout.py``; their scan: ``kernels/gradient_scan.py``; one result for all ranks:
   ``ranks/agreement.py``.
6. Update. ``optimizer.step()`` calls :meth:`StepRuntime.clip_and_check`. On an overflow ``StepGuard._finish_step``
   skips the update; otherwise the optimizer writes the masters, and the layout refreshes the working copies. With
   torch's fused Adam on a GPU the host does not wait: ``StepGuard._step_with_found_inf`` queues an update that the
   device skips, and ``_finish_step`` runs when the next backward reads S. One kernel for both writes:
   ``weights/fused_adamw.py``, ``kernels/adamw.py``, selected by ``registry.py``. Lean:
   ``weights/master_weight_optimizer.py``; halves of a master: ``kernels/split.py``; their reads: ``outside_reads.py``.
   With ``offload``, in chunks from host memory and back: ``weights/offload/``. Steps of optimizers that are not
   attached: ``unattached.py``.
7. Next scale. ``StepRuntime.finish_step`` notifies the observers (``observers.py``) and the loss scaler, which sets the
   next S: ``scaling/loss_scaler.py``, ``scaling/rules.py``. Steps of several optimizers between two backwards set it
   once.

``profiling.py`` names these stages for a profiler.
"""
