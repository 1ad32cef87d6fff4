# Warnings are for those who work on Terrace; they never reach a target that links it.
option(TERRACE_WERROR "Treat warnings as errors" OFF)

function(terrace_warnings target)
  target_compile_options(${target} PRIVATE -Wall -Wextra -Wconversion -Wshadow
    $<$<BOOL:${TERRACE_WERROR}>:-Werror>)
endfunction()

# terrace_library(name sources...): one floor of the house, exported as terrace::name.
function(terrace_library name)
  add_library(terrace_${name} STATIC ${ARGN})
  add_library(terrace::${name} ALIAS terrace_${name})
  set_target_properties(terrace_${name} PROPERTIES EXPORT_NAME ${name}
    POSITION_INDEPENDENT_CODE ON)
  target_compile_features(terrace_${name} PUBLIC cxx_std_20)
  target_include_directories(terrace_${name}
    PUBLIC $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/include>
           $<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>
    PRIVATE ${PROJECT_SOURCE_DIR})
  terrace_warnings(terrace_${name})
  set_property(GLOBAL APPEND PROPERTY TERRACE_LIBRARIES terrace_${name})
endfunction()
