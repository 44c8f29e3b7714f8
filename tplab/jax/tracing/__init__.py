"""From a rank's program to its trace.

1. JAX traces the program once for all ranks: a jaxpr (`jaxprs` reads one).
2. `divergence` refuses a program in which only some ranks would reach a collective. `decisions` lets it report which
   branches each rank took and how often its loops ran, where data decides that.
3. `walk` follows the jaxpr on all ranks at once and makes `tasks`: what is computed and sent, and which task needs
   which. It keeps what each variable holds (`held`): its values if they are small, and which ranks its data came from.
   It knows JAX's collectives from `exchange`, and the actions of a pipeline's schedule from `actions`.
4. `timing` runs the tasks on the modelled clock, each as soon as what it needs is ready.
5. `trace` records them as events.

The rest reads what XLA has finally made of a program. `hlo` reads the text of the compiled module, and `compiled` lists
its collectives. For `tplab.jax.trace`, of any function, `lowered` compiles it and finds its mesh, and `unroll` makes
tasks of its instructions, with the `work` of each; 4 and 5 go on as above. `sending` says what a collective
sends, and `flow` along which axes. For `tplab.jax.explain`, `flow` finds what made an array, and what needs it.
"""
