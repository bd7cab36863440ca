"""Names of media in what runs write and read. Images are the only kind. Cheap to import."""

MEDIA_COLUMN = "images"  # of rows in the cache, and of samples, which have names: the sha256 of each medium in hex
SAMPLE_MEDIA = "sample_pictures"  # a run's folder: small copies of the media that samples.jsonl names, NAME.png
STORED_MEDIA = (
    "pictures"  # of rows in the cache: the name of their file and of its entry, and what their number is called
)
