"""Names of media in what runs write and read, and the largest file of one. Cheap to import."""

MEDIA_COLUMN = "images"  # of rows in the cache, and of samples, which have names: the sha256 of each medium in hex
DIGESTS_COLUMN = "picture_digests"  # of prompts in the cache: the same
SAMPLE_MEDIA = "sample_pictures"  # a run's folder: small copies of the media that samples.jsonl names, NAME.png
STORED_MEDIA = (
    "pictures"  # of rows in the cache: the name of their file and of its entry, and what their number is called
)
MOST_FILE_BYTES = 2**26  # of one medium in a file
