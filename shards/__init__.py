"""The part of Patchline that is about datasets on disk: storage, sources, packing, index, verification and sample
order. Never imports torch."""
