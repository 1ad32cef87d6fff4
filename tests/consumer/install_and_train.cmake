# Arguments (-D): build, project, example, work, generator, compiler, build_type.
set(prefix ${work}/prefix)
file(REMOVE_RECURSE ${work})
file(MAKE_DIRECTORY ${work}/nvme)

function(run)
  execute_process(COMMAND ${ARGN} WORKING_DIRECTORY ${work} RESULT_VARIABLE status
    OUTPUT_VARIABLE output ERROR_VARIABLE output)
  if(NOT status EQUAL 0)
    string(JOIN " " command ${ARGN})
    message(FATAL_ERROR "${command}\n${output}\nended with ${status}")
  endif()
  set(output "${output}" PARENT_SCOPE)
endfunction()

function(build_against_it source name)
  run(${CMAKE_COMMAND} -S ${source} -B ${work}/${name} -G ${generator}
    -D CMAKE_CXX_COMPILER=${compiler} -D CMAKE_BUILD_TYPE=${build_type}
    -D CMAKE_PREFIX_PATH=${prefix})
  run(${CMAKE_COMMAND} --build ${work}/${name})
endfunction()

run(${CMAKE_COMMAND} --install ${build} --prefix ${prefix})
build_against_it(${project} project)
run(${work}/project/regression ${work}/nvme)
message(STATUS "${output}")
build_against_it(${example} example)
run(${work}/example/cpu_adam_example)
message(STATUS "${output}")
file(REMOVE_RECURSE ${work})
