"""MindSpore's own Ascend backend on a machine without CANN: it compiles and plans on stand-ins for CANN."""
