"""`demopt train --run ADDRESS`, `join`, `status`, `stop` and `replay`: workers train through a folder or bucket."""
