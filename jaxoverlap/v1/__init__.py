"""Generated from proto/jaxoverlap/v1; `.ci/proto` makes it again and compares."""
