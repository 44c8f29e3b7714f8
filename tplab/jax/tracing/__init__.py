"""From a rank's program to its trace.

1. JAX traces the program once for all ranks: a jaxpr (`jaxprs` reads one).
2. `divergence` refuses a program in which only some ranks would reach a collective. `decisions` lets the program report
   which branches each rank took and how often its loops ran, if these depend on data.
3. `walk` follows the jaxpr on all ranks at once and makes `tasks`: what is computed and sent, and their dependencies.
   It tracks what each variable holds (`held`): its values if they are small, and which ranks its data came from.
   JAX's collectives are in `exchange`, and the actions of a pipeline's schedule in `actions`.
4. `timing` runs the tasks on the modelled clock, each as soon as its dependencies have ended.
5. `trace` records them as events.

The other modules read the program that XLA compiled. `hlo` reads the text of the compiled module, and `compiled` lists
its collectives. For `tplab.jax.trace`, of any function, `lowered` compiles it and finds its mesh, and `unroll` turns
its instructions into tasks, with the `work` of each; then 4 and 5 follow. `sending` finds what a collective sends, and
`flow` along which axes. For `tplab.jax.explain`, `flow` finds what made an array, and what needs it.
"""
