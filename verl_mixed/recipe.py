"""`pkg://verl_mixed.recipe`: the classes of `samplers.recipe`, where a user has a `samplers` too.

verl is started in the user's folder, which Python then looks into first. A package or module there
with the name of one of ours stays what the user's code imports; ours is looked for behind it.
"""

from verl_mixed.shadowed import refuse_loaded, share_names

_both = share_names()
try:
    from samplers.recipe import ExactMixture, MixedDataset
finally:
    refuse_loaded(_both)

__all__ = ["ExactMixture", "MixedDataset"]
