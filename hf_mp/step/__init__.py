"""One training step in mixed precision, in the order in which it runs (Micikevicius et al. 2017, arXiv 1710.03740).

The last lines of a stage name files of other folders.

1. Attach. :meth:`MixedPrecision.attach` makes FP32 masters and replaces ``model.forward`` by :class:`AttachedForward`
   (``mixed_precision.py``, ``forward.py``). :meth:`~MixedPrecision.attach_optimizer` replaces ``optimizer.step`` by the
   step of a :class:`StepGuard` (``update.py``).
   Masters: ``weights/layout.py``; lean: ``weights/split_layout.py``.
2. Forward. ``AttachedForward`` enters a :class:`ForwardContext`. :meth:`StepRuntime.begin_forward` prepares the weights
   (``weights/weight_store.py``). If gradients are scaled, the parameter slots hold aliases of the FP32 weights, outputs
   of unscale nodes. Autocast finds the working copy of a weight or alias by its identity.
   Sharding: ``ranks/parallelism.py``; slots: ``weights/slots.py``; weights with a copy: ``weight_uses.py``; the copies:
   ``working_copies.py``; external tensors: ``external.py``; casts of each call: ``casting/handlers.py``, on a CPU
   ``cpu_handlers.py``, called by ``casting/dispatcher_kernels.py`` or ``casting/mode.py``; replaced parts of the model:
   ``models/``; losses: ``loss_handlers.py``; caches of keys and values: ``kv_cache.py``.
3. Outputs. ``cast_to_output`` casts each output to FP32 (``scale_boundary.py``).
   Outputs in a structure: ``kernels/nested.py``; logits that may not be read: ``deferred_output.py``.
4. Backward. The gradient of an output is multiplied by S (:class:`LossScaleProvider`, ``scale_provider.py``), and
   ``GradientCheck.record_backward`` records the backward and the loss. An unscale node multiplies gradients by 1/S in
   FP32; a lean layout stores them scaled (``weights/split_parameter.py``).
   Custom functions that recompute in their backward: ``custom_backward.py``.
5. Check. ``GradientCheck`` measures the gradients after the backward, for the next loss scale, and again in
   ``optimizer.step()``, because a loop may have changed them (``gradients.py``). With ``max_grad_norm``, it measures
   them again only if a version counter has changed.
   Scan of gradients: ``kernels/gradient_scan.py``; one result for all ranks: ``ranks/agreement.py``.
6. Update. :meth:`StepRuntime.clip_and_check` precedes it. ``StepGuard._finish_step`` skips it on an overflow; otherwise
   the optimizer writes the masters, and the layout refreshes the working copies. With torch's fused Adam on a GPU the
   host does not wait: ``StepGuard._step_with_found_inf`` launches an update that the device skips, and ``_finish_step``
   runs when the next backward reads S.
   Fused update: ``weights/fused_adamw.py``, ``kernels/adamw.py``; lean: ``weights/master_weight_optimizer.py``,
   ``kernels/split.py``, ``fp32_reads.py``; offloaded: ``weights/offload/``; optimizers that are not attached:
   ``unattached.py``.
7. Next scale. ``StepRuntime.report_step`` calls the observers (``observers.py``) and the loss scaler, which sets S:
   ``scaling/loss_scaler.py``, ``scaling/rules.py``.

``profiling.py`` names these stages for a profiler.
"""
