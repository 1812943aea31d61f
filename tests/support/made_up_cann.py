"""A folder that scripts/build_ascend.sh takes for CANN: it builds nothing, and notes how it is called."""

# Records how the functions of CANN's CMake are called and where libraries are looked for, and makes a package of the
# sources that CANN would put into it.
CMAKE = r"""
foreach(NAME npu_op_package npu_op_code_gen npu_op_library npu_op_kernel_sources npu_op_kernel_options
        npu_op_kernel_library npu_op_package_add)
    function(${NAME})
        string(REPLACE ";" " " WORDS "${CMAKE_CURRENT_FUNCTION};${ARGV}")
        file(APPEND $ENV{MINDLORA_TEST_LOG} "${WORDS}\n")
        cmake_parse_arguments(GIVEN "" "KERNEL_DIR;PACKAGE_PATH" "FILES" ${ARGV})
        if(GIVEN_KERNEL_DIR)
            file(COPY ${CMAKE_SOURCE_DIR}/${GIVEN_KERNEL_DIR}/ DESTINATION
                ${CMAKE_BINARY_DIR}/files/op_impl/ai_core/tbe/mindlora_impl/dynamic/${GIVEN_KERNEL_DIR})
        elseif(GIVEN_PACKAGE_PATH)
            file(COPY ${GIVEN_FILES} DESTINATION ${CMAKE_BINARY_DIR}/files/${GIVEN_PACKAGE_PATH})
        endif()
    endfunction()
endforeach()
set(ASCEND_AUTOGEN_PATH ${CMAKE_BINARY_DIR}/autogen)
file(APPEND $ENV{MINDLORA_TEST_LOG} "units ${ASCEND_COMPUTE_UNIT}\nlibraries $ENV{LD_LIBRARY_PATH}\n")
file(WRITE ${CMAKE_BINARY_DIR}/custom_opp_test.run [[
for argument; do case $argument in --install-path=*) folder=${argument#*=} ;; esac; done
mkdir -p "$folder/vendors/mindlora/bin" && touch "$folder/vendors/mindlora/bin/set_env.bash"
cp -r "$(dirname "$0")/files/." "$folder/vendors/mindlora"
]])
add_custom_target(binary)
add_custom_target(package)
"""


def made_up_cann(tmp_path, version, file="x86_64-linux/ascend_toolkit_install.info", cmake_code=CMAKE):
    """Makes a toolkit in tmp_path/cann: a file that names its version, and its CMake functions."""
    path = tmp_path / "cann" / file
    path.parent.mkdir(parents=True)
    path.write_text(f"package_name=Ascend-cann-toolkit\nversion={version}\narch=x86_64\n")
    cmake = tmp_path / "cann/compiler/tikcpp/ascendc_kernel_cmake"
    cmake.mkdir(parents=True)
    (cmake / "ASCConfig.cmake").write_text(cmake_code)
