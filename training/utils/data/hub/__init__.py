"""The open datasets that DeepSpeed-Chat's users know, by their hub names: one small file each.

Every module here is imported when names are looked up, so a new dataset is a new file. A folder that `save_to_disk`
wrote (or one of data files) serves in the hub's place where its path ends in the name. A dataset without an
evaluation split gets one carved (see `build`); one without rejected responses serves phases 1 and 3, and its rows
are dropped from phase 2 and counted, as is every row that lacks what a phase needs.
"""
