"""The open datasets that DeepSpeed-Chat's users know, by their hub names. Serves `--data_path`.

Every module here serves `--data_path`: the registry imports it to look up names. A folder that `save_to_disk` wrote (or
one of data files) is the dataset if its path ends in the name.
"""
