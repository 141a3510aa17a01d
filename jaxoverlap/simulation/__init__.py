"""An engine on paper: the real scheduler and loop, on a device and a host of given speeds."""
