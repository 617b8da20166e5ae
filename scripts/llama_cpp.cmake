# Leaves out llama.cpp's library for its own programs, which is half of a compilation of llama-cpp-python:
#     CMAKE_ARGS="-DCMAKE_PROJECT_llama_cpp_INCLUDE=$PWD/scripts/llama_cpp.cmake" pip install ...
# llama-cpp-python turns the library on in cmake's cache, and a variable overrides the cache.
set(LLAMA_BUILD_COMMON OFF)
