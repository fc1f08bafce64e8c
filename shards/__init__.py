"""The part of Patchline that handles datasets on disk: storage, sources, packing, index, verification and sample order.
It never imports torch."""

DISTRIBUTION = "patchline"  # `patchline.refuse_others` looks for this line
