"""An examination of the judge (`threestep audit`): faults planted one at a time into a plain trainer and into ours."""
