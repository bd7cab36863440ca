"""What families of models differ in that are more than a language model: classes, parts, files of a processor."""
